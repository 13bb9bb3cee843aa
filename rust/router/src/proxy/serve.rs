//! Listening, threads, and the end.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::config::Config;
use super::forward::HttpClient;
use super::handle::handle;
use super::state::Shared;
use super::{health, log};

const LISTEN_QUEUE: i32 = 4_096;
/// Shorter than what common servers keep idle connections for, so that few are found closed.
const WORKER_IDLE: Duration = Duration::from_secs(4);
/// Pause after an accept that failed for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why the router did not start, or stopped.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The settings cannot be used.
    #[error("the settings are unusable: {0}")]
    Config(String),
    /// The address cannot be listened on.
    #[error("cannot listen on {0}: {1}")]
    Listen(String, io::Error),
    /// Threads or signals cannot be had.
    #[error("cannot start: {0}")]
    Start(#[from] io::Error),
}

/// A router that listens and does not serve yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Server {
    /// Takes the port and registers the workers.
    ///
    /// # Errors
    /// The port cannot be had, or a worker's address is unusable.
    pub fn bind(config: Config) -> Result<Self, ServeError> {
        let name = format!("{}:{}", config.host, config.port);
        let failed = |error| ServeError::Listen(name.clone(), error);
        let listener = listen(&config).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let workers = config.workers.clone();
        let shared = Arc::new(Shared::new(config));
        for url in &workers {
            shared.add_worker(url).map_err(|refusal| ServeError::Config(refusal.message))?;
        }
        Ok(Self { listener, address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until SIGTERM or SIGINT, and then as long as requests in flight may take. A second
    /// signal ends it at once.
    ///
    /// # Errors
    /// Threads or signal handlers cannot be had.
    pub fn run(self) -> Result<(), ServeError> {
        let runtime = control_runtime()?;
        let signals = {
            let _inside = runtime.enter();
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
        };
        let (mut terminate, mut interrupt) = signals;
        let mut next = async move || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let (first, second) = tokio::sync::oneshot::channel();
        let (again, ended) = tokio::sync::oneshot::channel();
        runtime.spawn(async move {
            next().await;
            let _ = first.send(());
            next().await;
            let _ = again.send(());
        });
        self.serve(&runtime, async { drop(second.await) }, async { drop(ended.await) })
    }

    /// Serves until `stop` is done, and then as long as requests in flight may take.
    ///
    /// # Errors
    /// Threads cannot be had.
    pub fn run_until(self, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let runtime = control_runtime()?;
        self.serve(&runtime, stop, std::future::pending())
    }

    fn serve(
        self,
        runtime: &Runtime,
        stop: impl Future<Output = ()>,
        abort: impl Future<Output = ()>,
    ) -> Result<(), ServeError> {
        let threads = (0..self.shared.config.threads)
            .map(|number| Serving::start(number, &self.shared))
            .collect::<io::Result<Vec<_>>>()?;
        let grace = Duration::from_secs_f64(self.shared.config.shutdown_grace_s);
        runtime.block_on(async {
            for endpoint in self.shared.endpoints() {
                health::watch(&self.shared, endpoint);
            }
            log::line(format_args!("listening on http://{}", self.address));
            self.listener.set_nonblocking(true)?;
            let listener = tokio::net::TcpListener::from_std(self.listener)?;
            tokio::select! {
                () = accept(&listener, &threads) => {}
                () = stop => {}
            }
            take_rest(listener, &threads);
            self.shared.stopping.send_replace(true);
            log::line("stopping: requests in flight may end");
            let stops: Vec<_> = threads.into_iter().map(Serving::close).collect();
            let ended = tokio::task::spawn_blocking(move || {
                for thread in stops {
                    let _ = thread.join();
                }
            });
            tokio::select! {
                _ = ended => log::line("stopped"),
                () = sleep_until(Instant::now() + grace) => log::line("stopped; requests were cut off"),
                () = abort => log::line("stopped at once"),
            }
            Ok(())
        })
    }
}

fn control_runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn listen(config: &Config) -> io::Result<TcpListener> {
    let no_address = || io::Error::new(io::ErrorKind::AddrNotAvailable, "no such address");
    let address =
        (config.host.as_str(), config.port).to_socket_addrs()?.next().ok_or_else(no_address)?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if config.reuse_port {
        socket.set_reuse_port(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(LISTEN_QUEUE)?;
    Ok(socket.into())
}

/// Accepts connections for ever and deals them out.
async fn accept(listener: &tokio::net::TcpListener, threads: &[Serving]) {
    let mut turn = 0;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Ok(stream) = stream.into_std() {
                    threads[turn % threads.len()].take(stream);
                    turn += 1;
                }
            }
            Err(error) => {
                log::line(format_args!("cannot accept a connection: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Takes the connections that wait already, then stops listening.
fn take_rest(listener: tokio::net::TcpListener, threads: &[Serving]) {
    let Ok(listener) = listener.into_std() else { return };
    let mut turn = 0;
    while let Ok((stream, _)) = listener.accept() {
        if stream.set_nonblocking(true).is_ok() {
            threads[turn % threads.len()].take(stream);
            turn += 1;
        }
    }
}

/// A thread that serves connections, with connections to workers of its own: nothing of a request
/// crosses threads but the choice.
struct Serving {
    connections: UnboundedSender<TcpStream>,
    thread: JoinHandle<()>,
}

impl Serving {
    fn start(number: usize, shared: &Arc<Shared>) -> io::Result<Self> {
        let (connections, mut incoming) = mpsc::unbounded_channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let shared = Arc::clone(shared);
        let serve = async move {
            let client = worker_client(&shared.config);
            let mut tasks = JoinSet::new();
            loop {
                tokio::select! {
                    stream = incoming.recv() => match stream {
                        Some(stream) => {
                            tasks.spawn(connection(Arc::clone(&shared), client.clone(), stream));
                        }
                        None => break,
                    },
                    Some(_) = tasks.join_next() => {}
                }
            }
            while tasks.join_next().await.is_some() {}
        };
        let thread = std::thread::Builder::new()
            .name(format!("serve-{number}"))
            .spawn(move || runtime.block_on(serve))?;
        Ok(Self { connections, thread })
    }

    fn take(&self, stream: TcpStream) {
        // The thread lives until this end of the channel is dropped.
        let _ = self.connections.send(stream);
    }

    fn close(self) -> JoinHandle<()> {
        self.thread
    }
}

fn worker_client(config: &Config) -> HttpClient {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(Duration::from_secs_f64(config.connect_timeout_s)));
    Client::builder(TokioExecutor::new())
        .pool_idle_timeout(WORKER_IDLE)
        .pool_timer(TokioTimer::new())
        .build(connector)
}

/// Serves one client's connection to its end.
async fn connection(shared: Arc<Shared>, client: HttpClient, stream: TcpStream) {
    let Ok(stream) = tokio::net::TcpStream::from_std(stream) else { return };
    let _ = stream.set_nodelay(true);
    let mut stopping = shared.stopping.subscribe();
    let keep_alive = Duration::from_secs_f64(shared.config.keep_alive_timeout_s);
    let service = service_fn(move |request| {
        let answer = handle(Arc::clone(&shared), client.clone(), request);
        async move { Ok::<_, std::convert::Infallible>(answer.await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(keep_alive)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    // An error is the client's: it left, or spoke no HTTP.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = stopping.wait_for(|stopping| *stopping) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
