//! The end of a run: everything that is pending becomes visible.

use super::window::Submitted;
use super::{Offloading, Step};
use crate::engine::core::Core;
use crate::{Error, Result};

impl Offloading {
    /// Makes the pending update visible, then updates with the mean of the partial window over its own steps
    /// (ZenFlow's flush at the end of training).
    pub(crate) fn drain(&mut self, core: &mut Core) -> Result<()> {
        self.receive_all(core)?;
        if std::mem::take(&mut self.held) {
            self.pool.go()?;
        }
        self.show_pending(core)?;
        if self.clock.position > 0 {
            let Submitted { hypers, lr, .. } = self.last.clone();
            if hypers.is_empty() {
                return Err(Error::Input(
                    "the update window that the checkpoint left open cannot be ended: an earlier version wrote the checkpoint, \
                     without its learning rates; make at least one step first"
                        .into(),
                ));
            }
            let length = self.clock.cut();
            let step = Step { chosen: &[], hypers: &hypers, lr, grad_scale: 1.0 };
            self.end_window(core, &step, length, false)?;
            self.receive_all(core)?;
        }
        core.wait_all_published()
    }

    /// Makes the pending update visible.
    pub(super) fn show_pending(&mut self, core: &mut Core) -> Result<()> {
        if let Some(pending) = self.pending.take() {
            self.arriving.add(&pending);
        }
        for index in 0..self.parts.len() {
            self.arriving.anywhere[index] |= self.parts[index].as_ref().is_some_and(|part| !part.late.is_empty());
            self.apply_late(index, core)?;
        }
        self.receive_all(core)
    }
}
