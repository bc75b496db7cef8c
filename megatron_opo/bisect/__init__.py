"""Where do a server and the trainer compute different numbers for the same tokens?"""
