"""What each `twinpool` command does; cluster/cli.py declares them. None of them imports Ray."""
