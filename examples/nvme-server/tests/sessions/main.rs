//! Clients that do their worst, one after the other, and what the server still has for the next.
#![expect(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod fuse;
mod random;
mod server;

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, SealFlags, fcntl_setfl};
use rustix::net::sockopt::set_socket_linger;

use fuse::{Answers, Fuse};
use parking_lot::Mutex;
use server::*;

/// One test at a time: to start a program while a file does not close would wait for that.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_client_whose_eventfds_are_full_and_wait_again_costs_no_thread_and_no_later_client() {
    let _alone = ALONE.lock();
    let server = Server::start("full");
    let socket = server.connect();
    let ram = memfd(RAM_LEN, SealFlags::SHRINK);
    ask(&socket, DMA_MAP, &map_body(3, 0, RAM, RAM_LEN), &[ram.as_fd()]).unwrap();
    let event = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    ask(&socket, SET_IRQS, &interrupts(0, 1), &[event.as_fd()]).unwrap();
    (&event).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
    // The flags belong to the open file, which is one for both.
    fcntl_setfl(&event, OFlags::empty()).unwrap();
    (0..4).for_each(|n| ram.write_all_at(&identify(1), n * 64).unwrap());
    enable(&socket);
    register(&socket, 0x1000, 4);
    // The commands are done.
    let begun = Instant::now();
    let mut status = [0; 2];
    while status == [0; 2] {
        ram.read_exact_at(&mut status, 0x1000 + 3 * 16 + 14).unwrap();
        assert!(begun.elapsed() < LONG, "the fourth command has no completion");
    }
    drop(socket);
    serve_a_good_client(&server);
    server.settle(0);
}

#[test]
fn a_file_whose_server_never_answers_costs_its_client_the_session_and_nobody_else_anything() {
    let _alone = ALONE.lock();
    let server = Server::start("answers");
    // Gone before the server, which cannot end while a file waits.
    let fuse = match Fuse::new("answers") {
        Ok(fuse) => fuse,
        Err(error) => return eprintln!("SKIP: no file system of a process: {error}"),
    };
    let file = fuse.file().as_fd();
    // As memory, as an interrupt, too many, and where none is wanted.
    let bodies = [
        (DMA_MAP, map_body(3, 0, RAM, 0x1000), 1),
        (DMA_MAP, map_body(1, 0, RAM + 0x1000, 0x1000), 1),
        (DMA_MAP, map_body(3, 0, RAM, 0x1000), 2),
        (SET_IRQS, interrupts(0, 2), 2),
        (VERSION, b"\0\0\x01\0{}\0".to_vec(), 3),
        (DMA_UNMAP, words(&[24, 2, 0, 0, 0, 0]), 1),
        (77, Vec::new(), 20),
    ];
    let socket = server.connect();
    for (command, body, count) in &bodies {
        let _ = ask(&socket, *command, body, &vec![file; *count]);
    }
    drop(socket);
    serve_a_good_client(&server);
    // One that does not go is sent away, as its end of the socket may be among what stays open.
    let (socket, other) = (server.connect(), server.connect());
    ask(&socket, DMA_MAP, &map_body(3, 0, RAM, 0x1000), &[file]).unwrap();
    send(&socket, 77, POSTED, &[], &[socket.as_fd()]);
    let _stays_open = socket;
    assert!(ask(&other, VERSION, b"\0\0\x01\0{}\0", &[]).is_ok());
    drop(other);
    // A message that ends amid its descriptors.
    let socket = server.connect();
    send(&socket, DMA_MAP, 0, &[0; 3], &[file; 16]);
    drop(socket);
    serve_a_good_client(&server);
    // A thread for each of the three.
    server.settle(3);
    assert!(server.threads() > 1, "no file waits");
    fuse.set(Answers::AtOnce);
    server.settle(0);
    assert!(server.said().contains("do not close"), "{}", server.said());
}

#[test]
fn a_server_without_descriptors_for_a_client_goes_on_when_there_are_some() {
    let _alone = ALONE.lock();
    let server = Server::start("none");
    serve_a_good_client(&server);
    server.limit_files(3);
    let socket = server.connect();
    let begun = Instant::now();
    while !server.said().contains("has to wait") {
        assert!(begun.elapsed() < LONG, "{}", server.said());
        std::thread::sleep(Duration::from_millis(1));
    }
    server.limit_files(64);
    assert!(ask(&socket, VERSION, b"\0\0\x01\0{}\0", &[]).is_ok());
    drop(socket);
    serve_a_good_client(&server);
}

/// A connection that has more to send than its peer takes, and waits for that when it is closed.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    stream.set_nonblocking(true).unwrap();
    set_socket_linger(&stream, Some(Duration::from_secs(36_000))).unwrap();
    let bytes = [0; 1 << 16];
    while let Ok(_) | Err(ErrorKind::Interrupted) = stream.write(&bytes).map_err(|e| e.kind()) {}
    stream.set_nonblocking(false).unwrap();
    (stream, peer)
}

#[test]
fn a_socket_whose_close_waits_for_its_peer_waits_in_a_thread_of_its_own() {
    let _alone = ALONE.lock();
    let server = Server::start("linger");
    let mut peers = Vec::new();
    // Received, and left unread in the socket that the client leaves.
    for is_read in [true, false] {
        let (stream, peer) = lingering();
        peers.push(peer);
        let first = server.connect();
        ask(&first, VERSION, b"\0\0\x01\0{}\0", &[]).unwrap();
        // The server reads nothing of this one before the first has gone.
        let socket = server.connect();
        if !is_read {
            // A length that ends the session.
            let wrong = [1_u8, 0, 2, 0, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0];
            (&socket).write_all(&wrong).unwrap();
        }
        send(&socket, DMA_MAP, 0, &map_body(3, 0, RAM, 0x1000), &[stream.as_fd()]);
        // The message has the last descriptor.
        drop(stream);
        drop(first);
        if is_read {
            assert!(answer(&socket).is_ok());
        }
        drop(socket);
        serve_a_good_client(&server);
    }
    drop(peers);
    server.settle(0);
}

#[test]
fn a_client_that_leaves_its_own_end_of_the_socket_in_half_a_message_is_gone() {
    let _alone = ALONE.lock();
    let server = Server::start("half");
    let socket = server.connect();
    // The header of a message of 64 bytes, and of those 16, with which the descriptor comes.
    let header = [1_u8, 0, 2, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    (&socket).write_all(&header).unwrap();
    send(&socket, DMA_MAP, 0, &[], &[socket.as_fd()]);
    drop(socket);
    serve_a_good_client(&server);
    server.settle(0);
}

#[test]
fn a_client_that_leaves_its_end_of_the_socket_to_those_that_wait_is_gone() {
    let _alone = ALONE.lock();
    let server = Server::start("left");
    // The last one has the ends of all others, for some of which there is no room to wait.
    for crowd in [0, 100] {
        let socket = server.connect();
        ask(&socket, VERSION, b"\0\0\x01\0{}\0", &[]).unwrap();
        let others: Vec<_> = (0..crowd).map(|_| server.connect()).collect();
        let last = server.connect();
        let ends: Vec<_> = others.iter().chain([&socket]).map(AsFd::as_fd).collect();
        send(&last, VERSION, 0, b"\0\0\x01\0{}\0", &ends);
        drop((socket, others, last));
        serve_a_good_client(&server);
        server.settle(0);
    }
}

#[test]
fn random_sessions_with_every_kind_of_file_leave_a_server_that_serves() {
    let _alone = ALONE.lock();
    let count = std::env::var("DMASPAN_SESSIONS").map_or(2000, |count| count.parse().unwrap());
    random::run(count);
}
