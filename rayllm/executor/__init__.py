"""How plans reach workers: in this process, or Ray actors that are placed, watched and replaced from here."""
