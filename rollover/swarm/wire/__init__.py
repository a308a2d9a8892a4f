"""What a coordinator and a worker say to each other: the messages, the address, the token."""
