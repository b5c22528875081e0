"""What is wrong in the control plane of data-parallel ranks, in its model."""
