"""Every message between processes, and how it is coded, addressed and carried."""
