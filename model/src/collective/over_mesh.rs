//! The gang of a mesh's ranks, whatever moves their tensors.

use std::sync::Arc;

use super::members::Members;
use super::mesh::Mesh;
use super::nccl::Lanes;
use super::{Communicator, Formed, Gang, position, tcp};
use crate::Result;
use crate::ops::cuda::CudaDevice;

/// Every rank of a [`Mesh`].
#[derive(Debug)]
pub(crate) struct MeshGang {
    mesh: Arc<Mesh>,
    formed: Formed,
    moved_by: MovedBy,
}

/// What moves tensors between the ranks.
#[derive(Debug)]
enum MovedBy {
    /// See [`tcp`].
    Tcp,
    /// See [`nccl`](super::nccl).
    Nccl(Lanes),
}

impl MeshGang {
    /// A gang of CPUs: tensors go over the mesh.
    pub(crate) fn of_cpus(mesh: Arc<Mesh>) -> Self {
        Self::new(mesh, MovedBy::Tcp)
    }

    /// A gang of GPUs, of which this rank works on `device`: tensors go by NCCL.
    ///
    /// # Errors
    /// When NCCL is not there.
    pub(crate) fn of_gpus(mesh: Arc<Mesh>, device: &CudaDevice) -> Result<Self> {
        let lanes = Lanes::new(&mesh, device)?;
        Ok(Self::new(mesh, MovedBy::Nccl(lanes)))
    }

    fn new(mesh: Arc<Mesh>, moved_by: MovedBy) -> Self {
        Self {
            mesh,
            formed: Formed::default(),
            moved_by,
        }
    }
}

impl Gang for MeshGang {
    fn rank(&self) -> usize {
        self.mesh.rank()
    }

    fn size(&self) -> usize {
        self.mesh.size()
    }

    fn communicator(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let rank = position(self.rank(), self.size(), ranks)?;
        self.check()?;
        let members = Members {
            mesh: self.mesh.clone(),
            rank,
            ranks: ranks.to_vec(),
            number: self.formed.number(ranks),
        };
        match &self.moved_by {
            MovedBy::Tcp => tcp::join(members),
            MovedBy::Nccl(lanes) => Ok(lanes.join(members)),
        }
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.mesh.exchange(bytes)?)
    }

    fn check(&self) -> Result<()> {
        Ok(self.mesh.check()?)
    }

    fn abort(&self) {
        self.mesh.abort();
    }
}
