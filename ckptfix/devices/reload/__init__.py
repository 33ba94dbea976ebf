"""Reload a checkpoint onto a device map and prove what arrives, three ways.

``verifying`` is the entry. ``stored_weights`` reads the files twice, ``device_maps`` and
``dispatched`` place tensors, ``user_model`` and ``pretrained`` build the model, which ``filling``
fills. ``arrivals`` compares bytes, ``modelling`` and ``three_way`` compare outputs and name the
pair and the block at fault; ``reload_report`` holds what was proven, and shows it as a page.

>>> report = verify_reload("./checkpoint", device_map="auto", model="mypkg.models:build")
>>> report.status, [str(proof) for proof in report.proofs]
"""
