"""Did it help? Evaluations of several jobs side by side, and stored rollouts graded anew.

In: jobs. Out: differences with their intervals, case by case. Nothing is stored here.
"""
