"""Proof that a training run which is saved, killed and resumed continues bit for bit.

``resume_proof`` starts the script several times and asks for the verdict. ``startup`` brings
``recorder`` into each python of these runs; it alone imports torch. ``recorded_runs`` are the
values that a recorder writes, and ``resume_verdict`` compares them. ``causes`` is the table of
known causes, ``certificate`` the report.
"""
