"""Training: recorded episodes become token sequences, rows and gradients, and each new policy goes back into the engine, proven.

Import the modules by name (`art_gym_trainers.grpo`, `.sft`, `.publish`, `.models`…): this package itself loads no torch.
"""
