"""Files, devices and connections of one machine, on which every other package builds."""
