"""Token ids in, sampled continuations out: all that rollouts know of a model.

`protocol` says what is asked and answered; `local` is transformers in this process; `vllm` is an
engine in a process of its own. Not here: what a conversation is.
"""
