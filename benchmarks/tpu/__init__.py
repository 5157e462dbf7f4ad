"""What compiled TPU programs contain, read on a machine without a TPU, and measurements for machines with one."""
