"""Weights on the way: blobs named by their content, signed manifests, and both ends that write and fetch them."""
