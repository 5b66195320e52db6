"""Cases and a model in, rollouts out: messages, token ids, and the role of every token.

Not here: rewards (worker.training.rewards) and gradients (worker.training.update).
"""
