"""Attention and block copies, each beside its torch reference. Imports nothing of ours."""
