"""The scheduler inside other trainers. Each module or package integrates one of them, and ``feed`` is shared by all.

``feed``, ``hosted`` and ``record`` need neither torch nor any of those trainers.
"""
