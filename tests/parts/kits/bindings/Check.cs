using System;
using System.Collections.Concurrent;
using System.IO;
using System.Linq;
using System.Threading;

/// <summary>What a program in C# gets from the library: check BUNDLE BROKEN... Each line is a fact.</summary>
internal static class Check
{
    private static int Code(Action call)
    {
        try
        {
            call();
            return 0;
        }
        catch (AttnException error)
        {
            return error.Code;
        }
    }

    private static Session Ready(Bundle bundle)
    {
        var session = bundle.NewSession();
        session.SetInput("query", new long[] { 1, 4, 16 }, new float[64]);
        session.Prefill(64);
        return session;
    }

    /// <summary>Runs steps that go back before the cache is full; returns an element of the last output.</summary>
    private static float Steps(Session session, int count)
    {
        var query = new float[16];
        session.SetInput("query", new long[] { 1, 1, 16 }, query);
        for (int i = 0; i < count; i++)
        {
            if (session.Get(Fact.Held) == 64) session.Rewind(60);
            query[0] = 0.5f;
            session.Step();
            if (i % 1000 == 0) GC.Collect(); // which moves what is not pinned
        }
        return session.Output<float>("output", out long[] _)[0];
    }

    private static void TryBundle(string folder)
    {
        using (var bundle = new Bundle(folder, null, 1))
        {
            for (long index = 0; index < bundle.Get(Fact.Cases); index++)
                if (!bundle.TestCase(index, out string line)) throw new AttnException(8, line);
        }
    }

    private static long Resident() => long.Parse(File.ReadAllText("/proc/self/statm").Split(' ')[1]) * 4;

    private static void Main(string[] folders)
    {
        var bundle = new Bundle(folders[0], null, 1);
        Session fresh = bundle.NewSession(), session = Ready(bundle);
        Console.WriteLine("step without a prefill: " + Code(fresh.Step));
        Console.WriteLine("wrong size: " + Code(() => fresh.SetInput("query", new long[] { 1, 1, 15 }, new float[15])));
        Console.WriteLine("wrong bytes: " + Code(() => fresh.SetInput("query", new long[] { 1, 2, 16 }, new float[16])));
        Console.WriteLine("wrong row: " + Code(() => session.Fork(1)));
        Console.WriteLine("output before a run: " + Code(() => fresh.Output<float>("output", out long[] _)));
        fresh.Dispose();
        Console.WriteLine("closed: " + Code(fresh.Step) + " " + Code(fresh.Dispose));
        foreach (string folder in folders.Skip(1)) Console.WriteLine("broken: " + Code(() => TryBundle(folder)));
        var together = new float[2];
        var codes = new ConcurrentBag<int>();
        var threads = Enumerable.Range(0, 2).Select(at => new Thread(() =>
        {
            using (var mine = Ready(bundle)) together[at] = Steps(mine, 200);
            for (int n = 0; n < 200; n++) codes.Add(Code(() => session.Rewind(0))); // one session, two threads
        })).ToArray();
        foreach (var thread in threads) thread.Start();
        foreach (var thread in threads) thread.Join();
        Console.WriteLine("two threads agree: " + (together[0] == together[1]).ToString().ToLower());
        Console.WriteLine("other codes of one session in two threads: " + codes.Count(code => code != 0 && code != 4));
        bundle.Dispose(); // its sessions still work
        Steps(session, 2000);
        long before = Resident();
        Steps(session, 10000);
        Console.WriteLine("copied: " + session.Get(Fact.Copied));
        Console.WriteLine("grown: " + (Resident() - before));
        session.Dispose();
    }
}
