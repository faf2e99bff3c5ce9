//! Which cores do what.

use rustix::thread::{CpuSet, sched_setaffinity};
use zf_core::{Error, Result};

/// Lets the calling thread run on these cores alone.
///
/// # Errors
/// Cores that do not exist or that this process may not use.
pub fn pin_current_thread(cores: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &core in cores {
        if core >= CpuSet::MAX_CPU {
            return Err(Error::Config(format!("there is no core {core}")));
        }
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|error| {
        Error::Config(format!(
            "cannot run on the cores {cores:?}: {error}; name cores that this process may use in `host.cores`"
        ))
    })
}
