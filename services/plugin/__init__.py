"""How plug-ins register: one record for each (`plugin`), found by entry points (`registry`)."""
