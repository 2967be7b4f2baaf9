"""Files, devices and connections of one machine: the floor that every other room stands on."""
