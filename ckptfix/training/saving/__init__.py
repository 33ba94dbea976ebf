"""Saves that are complete or absent.

``save_state`` guards ``save_state`` and ``save_model``; ``joint_saves`` is one save of all
processes; ``staged_saves`` is the folder on its way and its exchange with the old one;
``save_manifest`` makes the manifest of a save, ``saved_digests`` takes the digests in it;
``checked_saves`` warns of what will not load. ``training.ranks`` brings all processes together
first. To record one more thing: a field of ``checkpoint.manifest`` that
``save_manifest.make_manifest`` fills.
"""
