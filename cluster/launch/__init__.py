"""Ray: starts roles by module name as child programs, watches and restarts them."""
