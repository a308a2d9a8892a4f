"""Answers and scores the responses of the policy.

Every environment has one turn so far: the policy responds to a prompt, and a reward comes back (``RewardScorer``). To
add a reward, write one file in ``rewards/`` and its row in ``rewards/__init__.py``.
"""
