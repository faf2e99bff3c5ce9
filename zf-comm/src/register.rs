//! The transports that run files choose by name.

use std::sync::Arc;

use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::Fabric;

use crate::{Threads, ThreadsConfig};

impl Build<slots::Transport> for ThreadsConfig {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Fabric>> {
        self.check().map_err(|(key, message)| zf_core::registry::setting(key, message))?;
        Ok(Arc::new(Threads::new(&self)?))
    }
}

zf_core::register!(
    slots::Transport,
    "threads",
    ThreadsConfig,
    "ranks are threads of one process and exchange tensors through shared memory",
    "ranks = 2"
);
