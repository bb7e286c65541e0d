"""The machines: nodes of devices, what they can do, and meshes on them."""
