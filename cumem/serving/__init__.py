"""How does a serving process decide what sleeps and what wakes?"""
