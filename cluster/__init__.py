"""What runs where, and how many: the contract between processes and the control plane."""
