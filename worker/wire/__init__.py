"""What supervisor and training process share: a run directory, and what lies in it.

Both sides import it; it knows neither the service nor torch.
"""
