using System;
using System.Diagnostics;
using System.Globalization;
using System.Linq;

/// <summary>Tests the bundle, runs it on an array of your own, decodes, generates, and embeds.</summary>
internal static class Attn
{
    private const string Usage = "usage: attn self-test [BUNDLE] | run IN.npy BATCH OUT.npy | decode [TOKENS] | generate ID,ID,... [TOKENS] | embed ID,ID,...";

    private static Bundle Open(string folder, bool spin) =>
        new Bundle(folder, Environment.GetEnvironmentVariable("ORT_DYLIB_PATH"), 0, spin);

    private static long Number(string text) => long.TryParse(text, out long value) ? value : -1;

    private static bool SelfTest(string folder)
    {
        using (var bundle = Open(folder, false))
        {
            long count = bundle.Get(Fact.Cases), good = 0;
            for (long index = 0; index < count; index++)
            {
                if (bundle.TestCase(index, out string line)) good++;
                Console.WriteLine(line);
            }
            Console.WriteLine($"{bundle.Name}: {good} of {count} passed, ONNX Runtime {bundle.RuntimeVersion}");
            return good == count;
        }
    }

    /// <summary>Runs the bundle on the rows of a file, which are repeated until there are so many as the batch.</summary>
    private static bool Run(string path, long batch, string output)
    {
        using (var bundle = Open("bundle", false))
        using (var session = bundle.NewSession())
        {
            string name = bundle.Values(Fact.Outputs)[0].Name;
            session.LoadInput(bundle.Values(Fact.Inputs)[0].Name, path, batch);
            session.Prefill();
            session.SaveOutput(name, output);
            session.Output<byte>(name, out long[] sizes);
            Console.WriteLine($"{output}: {name} [{string.Join(", ", sizes)}]");
        }
        return true;
    }

    /// <summary>Sets the inputs that a session does not make to zeros, for some tokens.</summary>
    private static void SetZeros(Bundle bundle, Session session, long tokens)
    {
        foreach (var input in bundle.Values(Fact.Inputs).Where(input => input.Needed))
        {
            long[] dims = input.Dims.Select((dim, at) => dim >= 0 ? dim : input.Axes[at] == "query_len" ? tokens : 1).ToArray();
            session.SetInput(input.Name, dims, new byte[dims.Aggregate((long)input.ElementBytes, (bytes, dim) => bytes * dim)]);
        }
    }

    private static bool Decode(long tokens)
    {
        if (tokens < 1) throw new ArgumentException("TOKENS is a number from 1");
        using (var bundle = Open("bundle", true))
        using (var session = bundle.NewSession())
        {
            if (bundle.Get(Fact.Cache) == 0)
            {
                Console.WriteLine($"{bundle.Name} has no KV cache: there is nothing to decode");
                return true;
            }
            SetZeros(bundle, session, 8);
            session.Prefill(8 + 64);
            SetZeros(bundle, session, 1);
            var watch = Stopwatch.StartNew();
            for (long made = 0; made < tokens; made++)
            {
                // Your program would write the next token into the array that it has set.
                if (made > 0 && made % 64 == 0) session.Rewind(64);
                session.Step();
            }
            Console.WriteLine(FormattableString.Invariant(
                $"{tokens} tokens: {watch.Elapsed.TotalMilliseconds / tokens:F4} ms per token, {session.Get(Fact.Held)} held"));
        }
        return true;
    }

    /// <summary>Reads ids with commas between them; what is no id is -1.</summary>
    private static long[] Numbers(string ids) => ids == "" ? new long[0] : ids.Split(',').Select(Number).ToArray();

    /// <summary>Prints the vectors of texts, in each word but the first the ids of one.</summary>
    private static bool Embed(string[] words)
    {
        using (var bundle = Open("bundle", false))
            foreach (var vector in bundle.Embed(words.Skip(1).Select(Numbers).ToArray()))
                Console.WriteLine(string.Join(" ", vector.Select(number => number.ToString("R", CultureInfo.InvariantCulture))));
        return true;
    }

    private static bool Generate(string ids, long count)
    {
        using (var bundle = Open("bundle", true))
        using (var session = bundle.NewSession())
        {
            string between = "";
            foreach (long token in session.Generate(Numbers(ids), count))
            {
                Console.Write(between + token);
                between = " ";
            }
            Console.WriteLine();
        }
        return true;
    }

    private static bool Choose(string[] words)
    {
        Func<int, string, string> other = (at, text) => words.Length > at ? words[at] : text;
        if (words.Length > 1 && words[0] == "embed") return Embed(words);
        switch (words.Length + other(0, ""))
        {
            case "1self-test": case "2self-test": return SelfTest(other(1, "bundle"));
            case "4run": return Run(words[1], Number(words[2]), words[3]);
            case "1decode": case "2decode": return Decode(Number(other(1, "64")));
            case "2generate": case "3generate": return Generate(words[1], Number(other(2, "64")));
            default: throw new ArgumentException(Usage);
        }
    }

    private static int Main(string[] words)
    {
        try
        {
            return Choose(words) ? 0 : 1;
        }
        catch (Exception error) when (error is AttnException || error is ArgumentException)
        {
            Console.Error.WriteLine(error.Message);
            return 2;
        }
    }
}
