"""The front door: HTTP in, requests paired with workers, tokens out. Imports no torch."""
