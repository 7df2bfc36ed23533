"""What is trained: the user's task on its device, the learning rate, batch norm over all ranks."""
