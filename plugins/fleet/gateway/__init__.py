"""Tells the controller what arrives and waits in this gateway, and the gateway which pools sleep or start workers."""
