"""The trace's numbers from its log-probabilities, without a model: what audits and what-if questions recompute.

Written apart from `hacpo.loss`, in numpy instead of torch, so that one checks the other (tests compare them).
"""
