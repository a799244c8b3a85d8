"""One request, from the moment it is seen to the answer."""
