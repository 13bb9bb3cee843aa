"""Engine: the loop around the scheduler, the model runner, models and weights."""
