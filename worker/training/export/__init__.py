"""A trained adapter or model in; a merged model or a GGUF file out. Its own process, CPU only.

Not here: where the files come from and where they go (worker.supervisor).
"""
