//! The transports that run files choose by name.

use std::sync::Arc;

use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::Fabric;

use crate::{C10d, C10dConfig, Threads, ThreadsConfig};

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

impl Build<slots::Transport> for C10dConfig {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Fabric>> {
        Ok(Arc::new(C10d::new(&self)?))
    }
}

zf_core::register!(
    slots::Transport,
    "c10d",
    C10dConfig,
    "ranks are processes, started by `zf launch`, torchrun, srun or mpirun, and exchange tensors over PyTorch's process \
     groups",
    "timeout = \"60s\""
);
