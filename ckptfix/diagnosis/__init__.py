"""Diagnosis of a checkpoint folder: the catalogue of damage, and the checks of ``check``. Free of
torch.
"""
