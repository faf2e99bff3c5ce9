//! How many threads an operator may use, which libtorch keeps for each calling thread.

use std::ffi::c_int;

use crate::{Error, Result, ffi};

/// Sets how many threads an operator that is called from this thread may use, the caller included. The first call in a
/// process also sets the default of threads that start later, so each rank thread sets its own first.
///
/// # Errors
///
/// If `count` is zero or does not fit a C `int`.
pub fn set_operator_threads(count: usize) -> Result<()> {
    const CALL: &str = "threads::set_operator_threads";
    let count = c_int::try_from(count).ok().filter(|&count| 0 < count).ok_or_else(|| Error::Argument {
        call: CALL,
        message: format!("the number of threads must be 1 to {}, not {count}", c_int::MAX),
    })?;
    // SAFETY: any positive number is accepted.
    ffi::check(CALL, unsafe { ffi::zf_set_threads(count) })
}

/// How many threads an operator that is called from this thread may use.
///
/// # Errors
///
/// If libtorch refuses.
pub fn operator_threads() -> Result<usize> {
    let mut out = 0;
    // SAFETY: `out` is a valid place.
    ffi::check("threads::operator_threads", unsafe { ffi::zf_threads(&mut out) })?;
    Ok(usize::try_from(out).unwrap_or(1))
}
