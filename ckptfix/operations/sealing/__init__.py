"""``seal`` and ``verify``: write down the digests of a checkpoint, and compare them later.

``contents`` is what there is to read, ``hashing`` reads it on all cores. ``recorded`` is what the manifest says,
``against`` another checkpoint; ``judging`` compares digests, ``describing`` says in words what differs, ``comparing``
does both for a whole checkpoint; ``values`` judges numbers, ``report`` is the result. ``following`` keeps the manifest
true when ``repair`` changes a folder.
"""
