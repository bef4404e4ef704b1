"""Ablations as data: one question a file; `harness ablate NAME` runs `ablations/NAME.py`."""
