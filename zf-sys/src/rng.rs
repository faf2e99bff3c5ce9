//! The state of libtorch's default CPU generator, which every random operator without a generator of its own draws from.
//! Rank threads of one process share it.

use crate::{Result, ffi, storage};

/// The generator's whole state, about 5 KB, to be given to [`set_cpu_state`].
///
/// # Errors
///
/// If libtorch refuses.
pub fn cpu_state() -> Result<Vec<u8>> {
    const CALL: &str = "rng::cpu_state";
    // SAFETY: `out` is a valid place.
    let state = ffi::tensor_out(CALL, |out| unsafe { ffi::zf_rng_state(out) })?
        .expect("zf_rng_state writes a handle when it succeeds");
    Ok(storage::slice::<u8>(&state)?.to_vec())
}

/// Puts the generator back into a state read by [`cpu_state`].
///
/// # Errors
///
/// If the bytes are not a state of this generator.
pub fn set_cpu_state(state: &[u8]) -> Result<()> {
    // SAFETY: pointer and length describe `state`, which is copied.
    ffi::check("rng::set_cpu_state", unsafe { ffi::zf_rng_set_state(state.as_ptr().cast(), state.len()) })
}
