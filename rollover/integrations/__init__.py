"""The scheduler inside other people's trainers. Each module is one of them; ``feed`` is what they share.

``feed``, ``hosted`` and ``record`` need neither torch nor any of those trainers.
"""
