"""Saves of transformers' Trainer that are complete or absent, and resumes from a complete one.

``trainer_saves`` runs in front of its saves, ``trainer_resumes`` in front of ``train`` and
``get_last_checkpoint``; ``trainer_patch`` installs both, and the check after ``save_pretrained``,
as soon as a script has imported transformers or PEFT, which are never imported from here.
"""
