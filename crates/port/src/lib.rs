//! Attachments: each kind of port, behind the one trait of the switch.
