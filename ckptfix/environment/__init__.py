"""``doctor``: problems of this environment, why they matter, and what to do.

``facts`` gathers, ``checks`` judge, ``doctor`` lists them. Nothing here imports torch: ``devices``
asks it in a process of its own.
"""
