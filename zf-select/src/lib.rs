//! Which columns of a weight are important.
