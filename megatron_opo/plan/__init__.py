"""What a recipe will need, told without a GPU: `megatron-opo plan`."""
