"""Who may work on a run: locks and leases."""
