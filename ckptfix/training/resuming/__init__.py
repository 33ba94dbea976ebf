"""Resume: ``guarded_load`` guards ``load_state`` and finds the newest complete checkpoint; ``generators``
reads and sets the states of random number generators, and compares states bit for bit.
"""
