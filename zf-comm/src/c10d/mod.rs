//! Ranks as processes, on one machine or several, over PyTorch's own process groups.

mod book;
mod control;
mod courier;
mod envelope;
mod line;
mod moves;
mod rendezvous;
mod shared;
mod transport;

use std::net::{IpAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, unbounded};
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::stage::{Fabric, Transport};
use zf_core::{Error, Result};
use zf_sys::c10d::{Device, Store};

pub use rendezvous::Rendezvous;
use shared::Shared;
use transport::C10dTransport;

/// Which of PyTorch's backends moves the bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The one that fits the tensors: Gloo for those of the CPU.
    #[default]
    Auto,
    /// Gloo: TCP between CPU tensors.
    Gloo,
}

/// Settings of the `c10d` transport. Rank, world and address come from the launcher: `zf launch`, `torchrun`, `srun` or
/// `mpirun`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct C10dConfig {
    /// The backend: `"auto"` or `"gloo"`.
    pub backend: Backend,
    /// How long a rank waits for a collective before the run ends with the name of the missing rank: `"60s"`,
    /// `"500ms"`, `"2m"`.
    #[serde(with = "zf_core::duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Consecutive ranks that share a machine, which the scope `"node"` means. By default what the launcher tells, or
    /// all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks_per_node: Option<usize>,
    /// Where rank 0 hosts the store by which ranks find each other, as `"host:port"`. By default what the launcher
    /// tells (`MASTER_ADDR` and `MASTER_PORT`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The network interface over which tensors move, such as `"eth0"`. By default `GLOO_SOCKET_IFNAME`, or the address
    /// from which this machine reaches the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
}

impl Default for C10dConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            timeout: Duration::from_secs(60),
            ranks_per_node: None,
            address: None,
            interface: None,
        }
    }
}

/// This process's rank of a run of several processes.
///
/// Rank 0 hosts the store (unless `torchrun` does), so that its end is the end of the run. Each pair of a list of ranks
/// and a channel has connections and a thread of its own, made when its first collective is issued. Before each
/// collective its members tell each other what they are about to do, in one message of 1 KiB that also carries data of up
/// to 784 bytes; these messages are not counted. Larger data move straight between sockets and the tensors' memory, and
/// sums are formed by the kernels of [`Threads`](crate::Threads) in the order of members, so that both transports give
/// the same bits.
///
/// A transport that is dropped waits for the other ranks to be done too, at most as long as the timeout.
#[derive(Debug)]
pub struct C10d {
    rendezvous: Rendezvous,
    config: C10dConfig,
    ranks_per_node: usize,
    connected: AtomicBool,
    /// The store, from the first use until the rank takes it with it.
    store: Mutex<Option<Store>>,
    /// Words of rank 0 heard so far.
    agreed: AtomicU64,
}

impl C10d {
    /// The rank that the launcher gave this process.
    ///
    /// # Errors
    /// [`Error::Config`]: no launcher, one of its variables is missing or wrong, or a setting is.
    pub fn new(config: &C10dConfig) -> Result<Self> {
        let get = |name: &str| std::env::var(name).ok();
        let rendezvous = Rendezvous::from_variables(get, config.address.as_deref())
            .map_err(|message| Error::Config(format!("`transport.kind = \"c10d\"`: {message}")))?;
        Self::at(rendezvous, config)
    }

    /// A rank at a place that the caller knows.
    ///
    /// # Errors
    /// [`Error::Config`]: a setting does not fit the world.
    pub fn at(rendezvous: Rendezvous, config: &C10dConfig) -> Result<Self> {
        let world = rendezvous.world;
        let ranks_per_node = config.ranks_per_node.or(rendezvous.local_world).unwrap_or(world);
        if !(1..=world).contains(&ranks_per_node) {
            return Err(Error::Config(format!(
                "transport.ranks_per_node = {ranks_per_node}; expected 1 to {world}, the number of ranks"
            )));
        }
        if rendezvous.rank >= world {
            return Err(Error::Config(format!("rank {} of a world of {world} ranks", rendezvous.rank)));
        }
        Ok(Self {
            rendezvous,
            config: config.clone(),
            ranks_per_node,
            connected: AtomicBool::new(false),
            store: Mutex::new(None),
            agreed: AtomicU64::new(0),
        })
    }

    /// Whether rank 0 hosts the store, and this is it.
    fn hosts_store(&self) -> bool {
        self.rendezvous.rank == 0 && !self.rendezvous.hosted_by_launcher
    }

    fn open_store(&self) -> Result<Store> {
        let Rendezvous { rank, host, port, .. } = &self.rendezvous;
        let timeout = self.config.timeout;
        let failed = |error: zf_sys::Error| Error::comm(format!("rank {rank}: the store at {host}:{port}: {error}"));
        let store = if self.hosts_store() {
            Store::host(host, *port, timeout).map_err(failed)?.0
        } else {
            let deadline = Instant::now() + timeout;
            self.await_host(deadline)?;
            Store::connect(host, *port, timeout).map_err(failed)?
        };
        let store = store.prefixed(&format!("zenflow/{}", self.rendezvous.attempt)).map_err(failed)?;
        if *rank == 0 {
            control::prepare(&store).map_err(failed)?;
        } else {
            control::await_prepared(&store, timeout).map_err(failed)?;
        }
        Ok(store)
    }

    /// Waits until somebody listens at the address of the store.
    fn await_host(&self, deadline: Instant) -> Result<()> {
        let Rendezvous { rank, host, port, .. } = &self.rendezvous;
        loop {
            let found = (host.as_str(), *port).to_socket_addrs().and_then(|addresses| {
                let mut last = Err(std::io::ErrorKind::NotFound.into());
                for address in addresses {
                    last = TcpStream::connect_timeout(&address, Duration::from_secs(1));
                    if last.is_ok() {
                        break;
                    }
                }
                last
            });
            match found {
                Ok(_) => return Ok(()),
                Err(error) if deadline < Instant::now() => {
                    return Err(Error::comm(format!(
                        "rank {rank}: nobody listens at {host}:{port}, where {} should, within {}: {error}",
                        self.store_host(),
                        crate::threads::seconds(self.config.timeout)
                    )));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn store_host(&self) -> String {
        if self.rendezvous.hosted_by_launcher { "the launcher".into() } else { "rank 0".into() }
    }

    /// The address from which tensors move.
    fn device(&self) -> Result<Device> {
        let Rendezvous { rank, host, port, .. } = &self.rendezvous;
        let interface = self.config.interface.clone().or_else(|| std::env::var("GLOO_SOCKET_IFNAME").ok());
        if let Some(name) = interface.filter(|name| !name.is_empty()) {
            return Device::at_interface(&name)
                .map_err(|error| Error::Config(format!("rank {rank}: the network interface {name:?}: {error}")));
        }
        let address = local_address(host, *port)
            .map_err(|error| Error::comm(format!("rank {rank}: no way to {host}:{port}: {error}")))?;
        if address.is_loopback() && self.ranks_per_node < self.rendezvous.world {
            return Err(Error::Config(format!(
                "rank {rank}: {host} is {address} on this machine, which others cannot reach; set MASTER_ADDR to an \
                 address of the network, or `transport.interface`"
            )));
        }
        Device::at_address(&address.to_string())
            .map_err(|error| Error::comm(format!("rank {rank}: listening at {address}: {error}")))
    }
}

/// The address of this machine from which packets to `host` go; nothing is sent.
fn local_address(host: &str, port: u16) -> std::io::Result<IpAddr> {
    let mut last = std::io::ErrorKind::NotFound.into();
    for address in (host, port).to_socket_addrs()? {
        let any: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let probe = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(address)?;
            socket.local_addr()
        });
        match probe {
            Ok(local) => return Ok(local.ip()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Fabric for C10d {
    fn world(&self) -> usize {
        self.rendezvous.world
    }

    fn local_ranks(&self) -> Vec<usize> {
        vec![self.rendezvous.rank]
    }

    fn connect(&self, rank: usize) -> Result<Box<dyn Transport>> {
        let Rendezvous { rank: own, world, .. } = self.rendezvous;
        if rank != own {
            return Err(Error::comm(format!("rank {rank} is not of this process, which is rank {own} of {world}")));
        }
        if self.connected.swap(true, Ordering::AcqRel) {
            return Err(Error::comm(format!(
                "rank {rank} is or was connected; a new process is needed to connect again"
            )));
        }
        let device = self.device()?;
        let store = match self.store.lock().take() {
            Some(store) => store,
            None => self.open_store()?,
        };
        let (asks, inbox) = unbounded();
        let shared = Arc::new(Shared::new((rank, world), self.config.timeout, self.store_host(), device, asks));
        let (end, ended) = bounded::<()>(0);
        let others = Arc::clone(&shared);
        let spawned = std::thread::Builder::new().name(format!("c10d-control-{rank}")).spawn(move || {
            let _end = end;
            control::run(&others, &store, &inbox);
        });
        let control = spawned
            .map_err(|error| Error::comm(format!("rank {rank}: cannot start its communication thread: {error}")))?;
        Ok(Box::new(C10dTransport::new(shared, (control, ended), self.hosts_store())))
    }

    fn timeout(&self) -> Duration {
        self.config.timeout
    }

    fn agree(&self, said: Vec<u8>) -> Result<Vec<u8>> {
        let mut held = self.store.lock();
        let store = match held.take() {
            Some(store) => held.insert(store),
            None => held.insert(self.open_store()?),
        };
        let key = format!("agreed/{}", self.agreed.fetch_add(1, Ordering::Relaxed));
        let rank = self.rendezvous.rank;
        let failed = |error: zf_sys::Error| {
            Error::comm(format!("rank {rank}: waiting for what rank 0 decides about the run: {error}"))
        };
        let heard_by = |rank: usize| format!("{key}/heard/{rank}");
        if rank == 0 {
            store.set(&key, &said).map_err(failed)?;
            // What rank 0 says may be why it ends, and the store ends with it. A rank that never comes is for the first
            // collective to name.
            let heard: Vec<String> = (1..self.rendezvous.world).map(heard_by).collect();
            let heard: Vec<&str> = heard.iter().map(String::as_str).collect();
            if !heard.is_empty() {
                let _ = store.wait(&heard, self.config.timeout.min(Duration::from_secs(10)));
            }
            return Ok(said);
        }
        let mut heard = store.get(&[&key], self.config.timeout).map_err(failed)?;
        store.set(&heard_by(rank), &[]).map_err(failed)?;
        heard.pop().ok_or_else(|| Error::comm(format!("rank {rank}: the store kept nothing of what rank 0 decided")))
    }

    fn ranks_per_node(&self) -> usize {
        self.ranks_per_node
    }
}
