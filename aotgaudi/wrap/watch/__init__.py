"""A guest as our child, watched from inside and outside: for a build, which learns, and a supervisor, which judges."""
